"""`python -m smolcluster.cli`."""

import sys

from smolcluster.cli import main

sys.exit(main())
