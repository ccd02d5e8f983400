"""The logger of our HTTP servers."""

import logging

from aiohttp.http_exceptions import HttpProcessingError

http_logger = logging.getLogger("rollout.http")
http_logger.addFilter(
    # The client has got its 400: whoever reaches a port must not fill the log with tracebacks.
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)
