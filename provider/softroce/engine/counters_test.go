package engine

import (
	"reflect"
	"testing"

	"ipoibcm/counters"
)

// TestCounters: every field has a name of its own, and is added.
func TestCounters(t *testing.T) {
	var c, sum Counters
	v, n := reflect.ValueOf(&c).Elem(), uint64(0)
	for i := range v.NumField() {
		if f := v.Field(i); f.Kind() == reflect.Uint64 {
			n++
			f.SetUint(n)
		}
	}
	for r := DropOpcode; r < NumDropReasons; r++ {
		n++
		c.Drops[r] = n
	}
	counters.Add(&sum, &c)
	counters.Add(&sum, &c)
	seen, total := map[string]bool{}, uint64(0)
	counters.Each(&sum, func(name string, value uint64) {
		if seen[name] {
			t.Errorf("%s is there twice", name)
		}
		seen[name] = true
		total += value
	})
	if uint64(len(seen)) != n || total != n*(n+1) {
		t.Errorf("%d of %d counters, sum %d, want %d", len(seen), n, total, n*(n+1))
	}
}
