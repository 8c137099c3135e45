"""What several commands need: options, the model they load, how they write and what they say."""
