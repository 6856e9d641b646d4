package main

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// An overridden is what a file says where a flag wins over it. A value there is checked all the
// same: it would count as soon as the flag goes, and until then nobody would hear that it is wrong.
type overridden struct {
	file  Config // with defaults
	path  string
	lines map[string]int // of the file
	keys  []string       // of settings that the file and flags have
}

// stem is the setting that a key is about: items of lists have keys of their own.
func stem(key string) string {
	name, _, _ := strings.Cut(key, "[")
	return name
}

// add says that a flag has the setting key too.
func (o *overridden) add(key string) {
	if _, ok := o.lines[key]; ok {
		o.keys = append(o.keys, key)
	}
}

// check says which value of the file is wrong, whatever flags say beside it. c is what is in
// force, and right. A value that is wrong only beside one of another flag is none: with the file's
// values in the place of all flags it is right.
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

// line is where key is in the file.
func (o *overridden) line(key string) int {
	if n, ok := o.lines[key]; ok {
		return n
	}
	return o.lines[stem(key)]
}

// wrong checks c with some settings of file, and returns the key of what is wrong.
func wrong(c, file *Config, keys ...string) (key string, err error) {
	mixed := *c
	at := reflect.ValueOf(&mixed).Elem()
	for i := range at.NumField() {
		if slices.Contains(keys, at.Type().Field(i).Tag.Get("yaml")) {
			at.Field(i).Set(reflect.ValueOf(file).Elem().Field(i))
		}
	}
	var v *valueError
	if err = mixed.check(); errors.As(err, &v) {
		key = v.key
	}
	return key, err
}
