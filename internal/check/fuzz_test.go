package main

import "testing"

func TestReadFuzz(t *testing.T) {
	got := readFuzz("fuzz: elapsed: 0s, gathering baseline coverage: 11/11 completed\n" +
		"fuzz: elapsed: 3s, execs: 25 (73/sec), new interesting: 0 (total: 11)\nfuzz: elapsed: 6s, execs: 706 " +
		"(436/sec), new interesting: 6 (total: 17)\nPASS\n")
	switch {
	case got.execs != 706:
		t.Errorf("execs is %v, want 706", got.execs)
	case got.fresh != 6:
		t.Errorf("fresh is %v, want 6", got.fresh)
	case got.total != 17:
		t.Errorf("total is %v, want 17", got.total)
	}
	if got := readFuzz("--- FAIL: FuzzX\n"); got != (fuzzRow{}) {
		t.Errorf("from nothing %+v", got)
	}
}
