package main

import (
	"go.yaml.in/yaml/v3"

	"ipoibcm/mtu"
)

// A udMTU is the setting ud_mtu: octets, or zero for "auto".
type udMTU int

// String implements [pflag.Value].
func (n udMTU) String() string { return numberOrAuto(int(n)) }

// Set implements [pflag.Value].
func (n *udMTU) Set(s string) error { return setOrAuto((*int)(n), s, "octets") }

// Type implements [pflag.Value].
func (n *udMTU) Type() string { return "octets" }

// UnmarshalYAML implements [yaml.Unmarshaler].
func (n *udMTU) UnmarshalYAML(value *yaml.Node) error {
	return intOrAuto((*int)(n), value, "ud_mtu 0: must be auto, or %d to %d octets", mtu.MinIPv4, mtu.MaxUD)
}

// most returns the largest UD MTU that the setting leads to.
func (n udMTU) most() int {
	if n == 0 {
		return mtu.DefaultUD
	}
	return int(n)
}
