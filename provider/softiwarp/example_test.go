package softiwarp_test

import (
	"context"
	"fmt"
	"net"

	"ipoibcm/mpa"
	"ipoibcm/provider/softiwarp"
)

// Two ends settle a connection over any net.Conn. The responder raises its IRD to
// what the initiator asks for; the RTR indication comes first, and then either
// side may send.
func ExampleStartup() {
	client, server := net.Pipe()
	done := make(chan struct{})
	go func() {
		defer close(done)
		s := softiwarp.Startup{Options: mpa.Options{Depths: mpa.Depths{IRD: 4, ORD: 4, MaxIRD: 16}}}
		st, _, err := s.Accept(context.Background(), server, func(_ context.Context, r mpa.Request) mpa.Event {
			fmt.Printf("asked: %v, private data %q\n", r.Peer, r.Private)
			return mpa.Accept{Private: []byte("welcome")}
		})
		if err != nil {
			fmt.Println(err)
			return
		}
		first, rtr, err := st.Read() // until then nothing may be sent
		fmt.Println("first message:", first.String(), rtr, err)
		st.Close()
	}()
	s := softiwarp.Startup{
		Options: mpa.Options{Negotiate: true, PeerToPeer: true, Depths: mpa.Depths{IRD: 2, ORD: 8}},
		Private: []byte("hello"),
	}
	st, res, err := s.Connect(context.Background(), func(context.Context) (net.Conn, error) { return client, nil })
	if err != nil {
		fmt.Println(err)
		return
	}
	<-done
	fmt.Printf("settled: IRD %v, ORD %v, RTR %v, private data %q\n", res.IRD, res.ORD, res.RTR, res.Private)
	st.Close()
	// Output:
	// asked: peer-to-peer rtr=send+write+read ird=2 ord=8, private data "hello"
	// first message: Write of 0 octets true <nil>
	// settled: IRD 2, ORD 8, RTR write, private data "welcome"
}
