"""`python -m polytoken.cli`, where the command itself is not on the path."""

import sys

from polytoken.cli import main

sys.exit(main())
