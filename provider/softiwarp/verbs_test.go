package softiwarp

import (
	"fmt"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"

	"ipoibcm/mpa"
	"ipoibcm/verbs/verbstest"
)

var lastPort atomic.Int32

// pair opens two devices on the loopback device.
func pair(t *testing.T, opts Options) (a, b *Device) {
	t.Helper()
	opts.Port = 21000 + os.Getpid()%580*20 + int(lastPort.Add(1)%20) // below those that the kernel gives to others
	open := func(addr string) *Device {
		opts.Addr = netip.MustParseAddr(addr)
		d, err := Open(opts)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = d.Close() })
		return d
	}
	return open("127.0.0.1"), open("127.0.0.2")
}

func TestVerbs(t *testing.T) {
	for _, o := range []mpa.Options{{}, {Markers: true, CRC: true, RTR: mpa.RTRSend}, {CRC: true, RTR: mpa.RTRRead}} {
		t.Run(fmt.Sprintf("markers=%v crc=%v rtr=%v", o.Markers, o.CRC, o.RTR), func(t *testing.T) {
			verbstest.Run(t, func(t *testing.T) verbstest.Pair {
				a, b := pair(t, Options{MPA: o})
				return verbstest.Pair{A: a, B: b}
			})
		})
	}
}
