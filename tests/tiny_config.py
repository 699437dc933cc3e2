"""The base config with the tests' overlay, for runs in a process of their own."""

from configs import base
from tests.overlay import shrink


def get_config():
  return shrink(base.get_config(), steps=8, checkpoint__every=3)
