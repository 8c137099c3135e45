"""What clients ask of a model: requests over HTTP, and files of prompts."""
