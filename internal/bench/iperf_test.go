package main

import (
	"strings"
	"testing"
	"time"
)

func TestDecodeIperf(t *testing.T) {
	for _, tt := range []struct {
		name, in string
		mbps     float64
	}{
		{"one way: what was received, not what was sent",
			`{"start":{},"end":{"sum_sent":{"bytes":9e9,"seconds":2},"sum_received":{"bytes":1e9,"seconds":2}}}`, 4000},
		{"both ways",
			`{"end":{"sum_received":{"bytes":1e9,"seconds":2},"sum_received_bidir_reverse":{"bytes":5e8,"seconds":2}}}`, 6000},
	} {
		got, err := decodeIperf([]byte(tt.in))
		if err != nil || got.mbps() != tt.mbps {
			t.Errorf("%s: %v Mb/s, want %v (%v)", tt.name, got.mbps(), tt.mbps, err)
		}
	}
	for _, tt := range []struct{ in, want string }{
		{`{"error":"unable to connect","end":{}}`, "unable to connect"},
		{`{"end":{"sum_received":{"bytes":0,"seconds":2}}}`, "nothing was received"},
		{`{"end":{"sum_received":{"bytes":1,"seconds":0}}}`, "nothing was received"},
		{``, "iperf3"},
	} {
		if _, err := decodeIperf([]byte(tt.in)); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.in, err, tt.want)
		}
	}
}

func TestCPUPerGB(t *testing.T) {
	x := transfer{octets: 4e9, seconds: 2, cpu: cpuUse{ours: 3 * time.Second, other: time.Hour}}
	if got := x.cpuPerGB(); got != 0.75 {
		t.Errorf("%v s/GB", got)
	}
}

func TestUntilLine(t *testing.T) {
	r := strings.NewReader("first\nServer listening on 5201\nrest\n")
	if err := untilLine(r, "Server listening"); err != nil {
		t.Fatal(err)
	}
	if r.Len() != len("rest\n") {
		t.Errorf("%d octets are left", r.Len())
	}
	if err := untilLine(r, "Server listening"); err == nil || !strings.Contains(err.Error(), "Server listening") {
		t.Errorf("at the end: %v", err)
	}
}

func FuzzDecodeIperf(f *testing.F) {
	f.Add([]byte(`{"end":{"sum_received":{"bytes":1e9,"seconds":2}}}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		if got, err := decodeIperf(in); err == nil && !(got.mbps() > 0) {
			t.Fatalf("%q is %v Mb/s", in, got.mbps())
		}
	})
}
