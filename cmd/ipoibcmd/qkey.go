package main

import (
	"fmt"

	"go.yaml.in/yaml/v3"
)

// A qKey is the setting qkey. Errors do not have its value, because they get into logs and reports.
type qKey uint32

// UnmarshalYAML implements [yaml.Unmarshaler].
func (k *qKey) UnmarshalYAML(value *yaml.Node) error {
	var n uint32
	if value.ShortTag() != "!!int" || value.Decode(&n) != nil {
		return &yaml.TypeError{Errors: []string{fmt.Sprintf(
			"line %d: qkey: want a whole number up to 0xffffffff, such as 0x00000b1b", value.Line)}}
	}
	*k = qKey(n)
	return nil
}
