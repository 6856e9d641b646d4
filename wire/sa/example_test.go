package sa_test

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/wire/sa"
)

// Asking for the broadcast group takes four components. Everything else about
// the group is in the answer.
func Example() {
	join := sa.Message{
		Header: sa.Header{Method: sa.MethodSet, TransactionID: 1, Mask: sa.JoinMask},
		Record: sa.MCMemberRecord{MGID: broadcast, PortGID: hostB, PKey: ib.DefaultPKey, JoinState: sa.FullMember},
	}
	octets, _ := join.AppendBinary(nil)
	fmt.Printf("%d octets, mask %#x\n", len(octets), join.Mask)

	var m sa.Message
	if err := m.UnmarshalBinary(octets); err != nil {
		fmt.Println(err)
	}
	fmt.Println(m.Method, m.Attr, m.Record.(sa.MCMemberRecord).JoinState)
	// Output:
	// 256 octets, mask 0x10083
	// Set MCMemberRecord full
}
