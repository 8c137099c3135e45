"""What differs between machines: devices, their names, and files in the user's cache folder."""

__all__: list[str] = []
