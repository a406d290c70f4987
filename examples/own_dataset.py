"""A dataset of your own: rows of any shape, read through a mapping of their columns.

    own_dataset.py ROWS.jsonl NAME

Here a row is {"org": "psf", "project": "requests", "number": 7, "parent": SHA, "fix": DIFF}.
"""

import sys
from pathlib import Path

from mirrord import Client

MAPPING = """\
instance_id = "{org}__{project}-{number}"
repo = "{org}/{project}"
base_commit = "parent"
patch = "fix"
"""

with Client() as client:
    importing = client.import_dataset(Path(sys.argv[1]), name=sys.argv[2], mapping=MAPPING)
    client.wait(importing)
    for instance in client.list_instances(sys.argv[2]):
        with client.checkout(instance.id) as checkout:
            print(instance.id, checkout.commit, sum(1 for _ in checkout.path.rglob("*.py")))
