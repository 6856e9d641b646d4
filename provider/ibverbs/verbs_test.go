//go:build ibverbs && cgo

package ibverbs

import (
	"flag"
	"testing"
	"time"

	"ipoibcm/verbs"
	"ipoibcm/verbs/verbstest"
)

// Where there are RDMA devices these name the network devices of two that reach
// each other; test/interop runs this in a guest.
var (
	flagA = flag.String("ibverbs.a", "", "network device of an RDMA device")
	flagB = flag.String("ibverbs.b", "", "network device of another, which reaches the first")
)

func TestVerbs(t *testing.T) {
	if *flagA == "" || *flagB == "" {
		t.Skip("no RDMA devices are named (-ibverbs.a and -ibverbs.b); make interop runs this on rdma_rxe")
	}
	verbstest.Run(t, func(t *testing.T) verbstest.Pair {
		open := func(underlay string) verbs.Provider {
			p, err := Open(Options{Underlay: underlay})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { p.Close() })
			return p
		}
		// rdma_rxe answers a message that is too long with "remote operation error" and
		// what a QP does not allow with "invalid request".
		return verbstest.Pair{Instead: map[verbs.Status][]verbs.Status{
			verbs.RemoteInvReq:     {verbs.RemoteOpError},
			verbs.RemoteAccess:     {verbs.RemoteInvReq},
			verbs.LocalLengthError: {verbs.LocalQPOpError},
		}, A: open(*flagA), B: open(*flagB), Timeout: 60 * time.Second, Quiet: 150 * time.Millisecond}
	})
}
