"""`python -m polytoken`, where the command itself is not on the path."""

import sys

from polytoken.cli import main

sys.exit(main())
