"""Where KV blocks go when the device forgets them: RAM, disk, Redis. No torch: a block here is bytes."""
