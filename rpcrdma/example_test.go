package rpcrdma_test

import (
	"fmt"
	"time"

	"ipoibcm/rpcrdma"
)

// Two ends, whose drivers only carry Sends: what one posts the other receives.
// The server knows version one only.
func ExampleConn() {
	client, _ := rpcrdma.NewConn(rpcrdma.Options{Client: true, Program: 100003, ProgVersion: 4, XID: 1})
	server, _ := rpcrdma.NewConn(rpcrdma.Options{MaxVersion: rpcrdma.Version1, SendSize: 8192, RecvSize: 8192})

	now := time.Now()
	var drive func(who string, c, peer *rpcrdma.Conn, ev rpcrdma.Event)
	drive = func(who string, c, peer *rpcrdma.Conn, ev rpcrdma.Event) {
		for _, a := range c.Step(nil, now, ev) {
			switch a := a.(type) {
			case rpcrdma.Send:
				h, _, _ := rpcrdma.ParseHeader(a.Data)
				fmt.Println(who, "sends", &h)
				other := map[string]string{"client": "server", "server": "client"}[who]
				drive(other, peer, c, rpcrdma.Recv{Data: a.Data})
			case rpcrdma.Serve:
				reply := rpcrdma.RPCReply{Status: rpcrdma.RPCSuccess}
				drive(who, c, peer, rpcrdma.Answer{ID: a.ID, Payload: reply.Append(nil)})
			case rpcrdma.Learned:
				fmt.Println(who, "learns: version", a.Version)
			case rpcrdma.Ready:
				fmt.Println(who, "is ready: version", a.Info.Version, "inline", a.Info.SendInline, a.Info.RecvInline)
			}
		}
	}
	drive("server", server, client, rpcrdma.Connected{Private: client.Private()})
	drive("client", client, server, rpcrdma.Connected{Private: server.Private()})

	// Output:
	// client sends v2 MSG xid=00000001 credit=32 CALL
	// server sends v2 ERROR xid=00000001 credit=32 VERS 1-1
	// client learns: version 1
	// client sends v1 MSG xid=00000002 credit=32
	// server is ready: version 1 inline 4096 4096
	// server sends v1 MSG xid=00000002 credit=32
	// client is ready: version 1 inline 4096 4096
}
