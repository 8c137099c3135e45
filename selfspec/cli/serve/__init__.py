"""`selfspec serve`: the options of the server and its start. The server itself is in `serving`."""
