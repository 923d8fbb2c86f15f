"""Tools for authors of volumes and for tests of a store, shipped with the package.

contract   the laws of core.volume.Volume as a test class to subclass (needs pytest and Hypothesis)
daemons    daemons in processes of their own, to be stopped, killed and started again
fakes      a volume in memory; faulty, slow and counting wrappers around any volume
emulation  emulated drives, for tests and as a plug-in volume
faults     errors, torn writes, stalls and kills between a drive and its disk
images     keys, payloads, record images and reads
clocks     a clock that moves only when a test moves it
"""
