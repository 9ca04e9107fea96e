"""`python -m sysdpo_lab`."""

from sysdpo_lab.cli import main

raise SystemExit(main())
