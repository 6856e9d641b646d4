package main

import (
	"fmt"
	"strconv"

	"go.yaml.in/yaml/v3"

	"ipoibcm/mtu"
)

// A udMTU is the setting ud_mtu: octets, or zero for "auto".
type udMTU int

// automatic is what a person calls the zero udMTU.
const automatic = "auto"

// String implements [pflag.Value].
func (n udMTU) String() string {
	if n == 0 {
		return automatic
	}
	return strconv.Itoa(int(n))
}

// Set implements [pflag.Value].
func (n *udMTU) Set(s string) error {
	if s == automatic {
		*n = 0
		return nil
	}
	v, err := strconv.Atoi(s)
	if err != nil || v == 0 {
		return fmt.Errorf("%q is neither auto nor a number of octets", s)
	}
	*n = udMTU(v)
	return nil
}

// Type implements [pflag.Value].
func (n *udMTU) Type() string { return "octets" }

// UnmarshalYAML implements [yaml.Unmarshaler].
func (n *udMTU) UnmarshalYAML(value *yaml.Node) error {
	if value.Kind == yaml.ScalarNode && value.Value == automatic {
		*n = 0
		return nil
	}
	var v int
	if err := value.Decode(&v); err != nil {
		return err
	}
	if v == 0 { // that is auto to us, and nothing to those who write it
		return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: ud_mtu 0: must be auto, or %d to %d octets", value.Line, mtu.MinIPv4, mtu.MaxUD)}}
	}
	*n = udMTU(v)
	return nil
}

// most is the largest UD MTU that the setting leads to.
func (n udMTU) most() int {
	if n == 0 {
		return mtu.DefaultUD
	}
	return int(n)
}
