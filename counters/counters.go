// Package counters reads structs of counters. A counter is a field, a uint64 or an
// atomic one, and its tag is the only place that has its name:
//
//	Retransmits uint64 `name:"retransmits"` // packets sent again
//
// To count is to add to the field; reflection is for those who read. A field that
// is an array has a counter for each value of an enumeration: see [Names]. One
// without a tag is no counter.
package counters

import (
	"reflect"
	"unsafe"
)

// Names gives names to the counters in an array. [Each] appends each name to the name in the tag, and leaves
// out counters without a name.
type Names interface{ Name(i int) string }

// Each calls f for every counter of c, in the order of the fields.
func Each[T any](c *T, f func(name string, value uint64)) {
	v := reflect.ValueOf(c).Elem()
	for about, field := range v.Fields() {
		name, named := about.Tag.Lookup("name")
		switch {
		case !named:
		case field.Kind() == reflect.Array:
			names := pointer(field).(Names)
			for k := range field.Len() {
				if n := names.Name(k); n != "" {
					f(name+n, load(field.Index(k)))
				}
			}
		default:
			f(name, load(field))
		}
	}
}

// Add adds the counters of from to those of to. Both have the same fields; those of
// to are not atomic.
func Add[T, F any](to *T, from *F) {
	t, f := reflect.ValueOf(to).Elem(), reflect.ValueOf(from).Elem()
	if same, ok := any(from).(*T); ok && isWords(t) {
		sums := words(to)
		for i, n := range words(same) {
			sums[i] += n
		}
		return
	}
	for i := range t.NumField() {
		if t.Field(i).Kind() != reflect.Array {
			add(t.Field(i), f.Field(i))
			continue
		}
		for k := range t.Field(i).Len() {
			add(t.Field(i).Index(k), f.Field(i).Index(k))
		}
	}
}

// Raise makes each counter of to as large as that of from. All fields of T are uint64 or arrays of uint64.
func Raise[T any](to, from *T) {
	raised := words(to)
	for i, n := range words(from) {
		raised[i] = max(raised[i], n)
	}
}

// isWords reports whether all fields of c are uint64 or arrays of uint64. Then Add needs no reflection for
// each field, which matters to a provider that adds up ten thousand queue pairs, each under its lock.
func isWords(c reflect.Value) bool {
	for i := range c.NumField() {
		f := c.Field(i)
		if f.Kind() == reflect.Array {
			f = f.Index(0)
		}
		if f.Kind() != reflect.Uint64 {
			return false
		}
	}
	return true
}

// words returns c as a slice. isWords must hold for c.
func words[T any](c *T) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(c)), unsafe.Sizeof(*c)/unsafe.Sizeof(uint64(0)))
}

func add(to, from reflect.Value) { *pointer(to).(*uint64) += load(from) }

func load(v reflect.Value) uint64 {
	if v.Kind() == reflect.Uint64 {
		return v.Uint()
	}
	return pointer(v).(interface{ Load() uint64 }).Load()
}

// pointer returns a pointer to v, which may be a field that is not exported.
func pointer(v reflect.Value) any {
	return reflect.NewAt(v.Type(), v.Addr().UnsafePointer()).Interface()
}
