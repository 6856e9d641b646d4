package main

import (
	"testing"

	"ipoibcm/internal/expect"
)

func TestReadFuzz(t *testing.T) {
	got := readFuzz("fuzz: elapsed: 0s, gathering baseline coverage: 11/11 completed\n" +
		"fuzz: elapsed: 3s, execs: 25 (73/sec), new interesting: 0 (total: 11)\nfuzz: elapsed: 6s, execs: 706 " +
		"(436/sec), new interesting: 6 (total: 17)\nPASS\n")
	expect.Equal(t, got.execs, 706, "execs")
	expect.Equal(t, got.fresh, 6, "fresh")
	expect.Equal(t, got.total, 17, "total")
	if got := readFuzz("--- FAIL: FuzzX\n"); got != (fuzzRow{}) {
		t.Errorf("from nothing %+v", got)
	}
}
