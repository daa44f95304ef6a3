"""Reading a record's headers: the one way in which a name that is not UTF-8 does no harm.

The client's `Message.headers` then returns a broken list with an exception set. The interpreter
notices that in a plain call only until it has specialised it, as it does in any loop: from then on
the exception comes up somewhere later, and the list ends the process. `methodcaller` goes by the
general protocol, which always checks.
"""

from __future__ import annotations

from operator import methodcaller

read_headers = methodcaller("headers")
"""Of a Message: its headers or None. Raises SystemError for a name that is not UTF-8; such a
record must not be asked again."""
