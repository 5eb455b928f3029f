"""Messages that agents, servers and clients exchange, as msgspec structs.

`wire` and `orders` define what an agent sends and receives; `jobs`, `fleet`, `timeline`, `analyses` and
`administration` are answers of the HTTP API. A field that a later version adds has a default, so that messages of
an earlier one can still be decoded. May import `pacing`; uses neither torch nor the server.
"""
