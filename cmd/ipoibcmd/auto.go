package main

import (
	"fmt"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// automatic is the word for the zero of a number that the program may choose.
const automatic = "auto"

func numberOrAuto(n int) string {
	if n == 0 {
		return automatic
	}
	return strconv.Itoa(n)
}

// setOrAuto sets n to the number in s, or to zero for "auto". unit, the plural of what n counts, is for the
// error.
func setOrAuto(n *int, s, unit string) error {
	if s == automatic {
		*n = 0
		return nil
	}
	v, err := strconv.Atoi(s)
	if err != nil || v == 0 {
		return fmt.Errorf("%q is neither auto nor a number of %s", s, unit)
	}
	*n = v
	return nil
}

// intOrAuto is setOrAuto for a value in the configuration file. A zero in the file is an error, because
// zero means auto only inside the program. format and args make the text of that error.
func intOrAuto(n *int, value *yaml.Node, format string, args ...any) error {
	if value.Kind == yaml.ScalarNode && value.Value == automatic {
		*n = 0
		return nil
	}
	var v int
	if err := value.Decode(&v); err != nil {
		return err
	}
	if v == 0 {
		return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: ", value.Line) + fmt.Sprintf(format, args...)}}
	}
	*n = v
	return nil
}
