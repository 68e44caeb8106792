"""pyarrow's compute functions, which it makes when it is imported: a type checker does not see them."""

from __future__ import annotations

from typing import Any

import pyarrow.compute

compute: Any = pyarrow.compute
