package main

import (
	"context"
	"errors"
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
		got, err := twice(context.Background(), b, &pair{contender: raw}, place{mtu: 9000}, func() (int, error) {
			n++
			return n, tt.errs[n-1]
		})
		if !errors.Is(err, tt.want) || n != tt.attempts || got != n || len(b.r.Skipped) != tt.told {
			t.Errorf("%s: %d, %v after %d attempts, %v told", tt.name, got, err, n, b.r.Skipped)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	b, n := &bench{}, 0
	if _, err := twice(ctx, b, &pair{}, place{}, func() (int, error) { n++; return 0, late }); err == nil || n != 1 || len(b.r.Skipped) != 0 {
		t.Errorf("interrupted: %v after %d attempts", err, n)
	}
}
