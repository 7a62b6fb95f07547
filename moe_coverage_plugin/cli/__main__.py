"""``python -m moe_coverage_plugin.cli``, where the script is not on the path."""

import sys

from moe_coverage_plugin.cli import main

sys.exit(main())
