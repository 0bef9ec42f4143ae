"""``arriero`` whose ranks lose patience with a hanging one after 10 s instead of 45, so that the suite needn't wait."""

from arriero.__main__ import main
from arriero.monitor import heartbeat

heartbeat.LEAST_S = 10.0
main()
