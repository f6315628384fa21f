"""Print what one extra of pyproject.toml needs, one requirement a line: `requirements.py pyproject.toml EXTRA...`.

Images install these in a layer of their own, which stays as it is while only the code changes.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
requirements = [*project["dependencies"]]
for extra in sys.argv[2:]:
    requirements += project["optional-dependencies"][extra]
print("\n".join(requirements))
