"""From a record to token ids and the weight of each: an encoder for each kind of data that a strategy learns from."""
