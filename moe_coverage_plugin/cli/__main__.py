"""``python -m moe_coverage_plugin.cli``, for environments whose scripts are not on the path."""

import sys

from moe_coverage_plugin.cli import main

sys.exit(main())
