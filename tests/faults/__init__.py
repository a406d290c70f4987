"""The fault suite: what breaks while mirrord works, and what is left of its promises afterwards."""
