"""What a run says of itself: metrics' writers and loggers, throughput and MFU, events, diagnostics, loss spikes."""
