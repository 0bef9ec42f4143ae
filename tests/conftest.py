"""No test may wait for a hub: an id that isn't there costs half a minute of attempts where there is no network."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
