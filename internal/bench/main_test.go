package main

import (
	"context"
	"errors"
	"strings"
	"testing"
)

func TestTwice(t *testing.T) {
	late := errors.New("connection refused")
	for _, tt := range []struct {
		name     string
		errs     []error
		want     error
		told     int
		attempts int
	}{
		{"at once", []error{nil}, nil, 0, 1},
		{"the second time", []error{late, nil}, nil, 1, 2},
		{"never", []error{late, late, nil}, late, 1, 2},
	} {
		b, n := &bench{}, 0
		err := b.twice(context.Background(), &mesh{contender: raw}, func(*mesh) error {
			n++
			return tt.errs[n-1]
		})
		switch {
		case !errors.Is(err, tt.want):
			t.Errorf("%s: err is %v, want %v", tt.name, err, tt.want)
		case n != tt.attempts:
			t.Errorf("%s: n is %v, want %v", tt.name, n, tt.attempts)
		case len(b.r.Skipped) != tt.told:
			t.Errorf("%s: Skipped has %v elements, want %v", tt.name, len(b.r.Skipped), tt.told)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	b, n := &bench{}, 0
	switch err := b.twice(ctx, &mesh{}, func(*mesh) error { n++; return late }); {
	case err == nil:
		t.Errorf("interrupted: err is nil")
	case n != 1:
		t.Errorf("interrupted: n is %v, want 1", n)
	case len(b.r.Skipped) != 0:
		t.Errorf("interrupted: Skipped has %v elements, want 0", len(b.r.Skipped))
	}
}

// Hosts that cannot be made, for want of root or of a sane MTU, are an error.
func TestMeshThatCannotBeMade(t *testing.T) {
	_, err := new(bench).newMesh(context.Background(), raw, meshKind{at: place{mtu: 1, family: family6}, size: 2, veth: true})
	if err == nil || !strings.Contains(err.Error(), raw) {
		t.Errorf("err is %v, want one that names %q", err, raw)
	}
}
