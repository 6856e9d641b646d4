package main

import (
	"fmt"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// A trafficClass is the setting traffic_class as ip-tunnel(8) has it: a number, inherit, or inherit/NUMBER.
// The bit inheritClass stands for inherit.
type trafficClass int

// inheritClass has datagrams take the DSCP of the IP packet in them.
const inheritClass trafficClass = 1 << 16

const inheritWord = "inherit"

// inherits reports whether the DSCP of IP packets is copied.
func (c trafficClass) inherits() bool { return c >= inheritClass }

// fixed returns the class of packets that inherit none.
func (c trafficClass) fixed() int {
	if c.inherits() {
		return int(c - inheritClass)
	}
	return int(c)
}

// String implements [pflag.Value].
func (c trafficClass) String() string {
	switch n := c.fixed(); {
	case !c.inherits():
		return strconv.Itoa(n)
	case n > 0:
		return fmt.Sprintf("%s/%d", inheritWord, n)
	}
	return inheritWord
}

// Set implements [pflag.Value].
func (c *trafficClass) Set(s string) error {
	rest, inherits := strings.CutPrefix(s, inheritWord)
	n := 0
	if number, slash := strings.CutPrefix(rest, "/"); !inherits || rest != "" {
		var err error
		if n, err = strconv.Atoi(number); err != nil || inherits != slash || n < 0 || n >= int(inheritClass) {
			return fmt.Errorf("%q is neither a number from 0 to 252, nor inherit, nor inherit/NUMBER", s)
		}
	}
	*c = trafficClass(n)
	if inherits {
		*c += inheritClass
	}
	return nil
}

// Type implements [pflag.Value].
func (c *trafficClass) Type() string { return "class" }

// UnmarshalYAML implements [yaml.Unmarshaler].
func (c *trafficClass) UnmarshalYAML(value *yaml.Node) error {
	err := c.Set(value.Value)
	if value.Kind != yaml.ScalarNode || err != nil {
		return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: traffic_class: %v", value.Line, err)}}
	}
	return nil
}
