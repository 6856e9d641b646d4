package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// An overridden is a configuration file some of whose settings flags override. It checks the overridden
// values too. Otherwise a wrong one would be found only when somebody removes its flag.
type overridden struct {
	file  Config // with defaults
	path  string
	lines map[string]int // of the file
	keys  []string       // settings that both the file and flags have
}

// stem returns the setting to which a key belongs: peers for peers[0], the key of an item of a list.
func stem(key string) string {
	name, _, _ := strings.Cut(key, "[")
	return name
}

// add notes that a flag sets key, if the file does too.
func (o *overridden) add(key string) {
	if _, ok := o.lines[key]; ok {
		o.keys = append(o.keys, key)
	}
}

// check returns an error if an overridden value of the file is wrong twice: with the values of the flags in
// all other settings, and with all overridden values of the file. A value that is wrong in only one of
// these is no error. c is the configuration in force, which is valid.
func (o *overridden) check(c *Config) error {
	keys := slices.Clone(o.keys)
	for len(keys) > 0 {
		key, _ := wrong(c, &o.file, keys...)
		if !slices.Contains(keys, stem(key)) {
			return nil
		}
		if at, err := wrong(c, &o.file, stem(key)); stem(at) == stem(key) {
			return fmt.Errorf("%s: line %d: %w (a flag wins over it, until it goes)", o.path, o.line(at), err)
		}
		keys = slices.DeleteFunc(keys, func(k string) bool { return k == stem(key) })
	}
	return nil
}

// line returns the line of key in the file.
func (o *overridden) line(key string) int {
	if n, ok := o.lines[key]; ok {
		return n
	}
	return o.lines[stem(key)]
}

// wrong checks c with the settings keys taken from file. It returns the key of the value that is wrong.
func wrong(c, file *Config, keys ...string) (key string, err error) {
	mixed := *c
	mixed.take(file, keys)
	var v *valueError
	if _, err = mixed.settings(); errors.As(err, &v) {
		key = v.key
	}
	return key, err
}
