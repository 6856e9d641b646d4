package simfabric

import (
	"fmt"
	"testing"
	"time"

	"ipoibcm/ib"
	"ipoibcm/verbs/verbstest"
)

func testGID(s string) ib.GID {
	g, err := ib.ParseGID(s)
	if err != nil {
		panic(err)
	}
	return g
}

// TestConformance runs the provider suite on a perfect network, on IPv6 and on
// IPv4, and with every path MTU.
func TestConformance(t *testing.T) {
	for _, family := range []string{"2001:db8::", "192.0.2."} {
		for _, mtu := range []ib.MTU{ib.MTU256, ib.MTU1024, ib.MTU4096} {
			t.Run(fmt.Sprintf("%s/%v", family, mtu), func(t *testing.T) {
				verbstest.Run(t, func(t *testing.T) verbstest.Pair {
					f := New(1, Options{})
					a := f.NewPort(PortOptions{GID: testGID(family + "1"), MTU: mtu})
					b := f.NewPort(PortOptions{GID: testGID(family + "2"), MTU: mtu})
					return verbstest.Pair{A: a, B: b, Pass: f.RunFor, Quiet: 20 * time.Millisecond}
				})
			})
		}
	}
}
