package main

import (
	"runtime"

	"go.yaml.in/yaml/v3"

	"ipoibcm/provider/softroce"
)

// A threadCount is the setting threads: how many, or zero for "auto".
type threadCount int

const (
	// mostAuto bounds the threads of "auto".
	mostAuto = 4
	// oneAuto is the most processors for which "auto" is one thread. A peer has one connection, so one
	// thread, and of two processors the other one is left to the programs of the host.
	oneAuto = 2
)

// String implements [pflag.Value].
func (n threadCount) String() string { return numberOrAuto(int(n)) }

// Set implements [pflag.Value].
func (n *threadCount) Set(s string) error { return setOrAuto((*int)(n), s, "threads") }

// Type implements [pflag.Value].
func (n *threadCount) Type() string { return "count" }

// UnmarshalYAML implements [yaml.Unmarshaler].
func (n *threadCount) UnmarshalYAML(value *yaml.Node) error {
	return intOrAuto((*int)(n), value, "threads 0: must be auto, or 1 to %d", softroce.MaxThreads)
}

// threads returns the number of data threads: one unless the provider is softroce. "auto" is GOMAXPROCS,
// but at most mostAuto, and one on up to oneAuto processors. By default, GOMAXPROCS is the number of
// processors that affinity, cpuset and the quota of the control group leave to this process.
func (c *Config) threads() int {
	switch {
	case c.Provider != softRoCE:
		return 1
	case c.Threads == 0 && runtime.GOMAXPROCS(0) <= oneAuto:
		return 1
	case c.Threads == 0:
		return min(mostAuto, runtime.GOMAXPROCS(0))
	}
	return int(c.Threads)
}
