package mad_test

import (
	"fmt"

	"ipoibcm/ib"
	"ipoibcm/serviceid"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// A REQ as IPoIB sends it, and what its receiver reads of it.
func Example() {
	req := mad.REQ{
		TransactionID: 1, LocalCommID: 0x11223344, ServiceID: serviceid.New(serviceid.RFC, 0x456),
		LocalQPN: 0xa1, Transport: ib.RC, PKey: ib.DefaultPKey, PathMTU: ib.MTU1024,
	}
	private, _ := encap.PrivateData{QPN: 0x123, ReceiveMTU: 65524}.AppendBinary(nil)
	copy(req.PrivateData[:], private)
	octets, _ := req.AppendBinary(nil)

	header, msg, err := mad.Parse(octets)
	if err != nil {
		fmt.Println(err)
		return
	}
	got := msg.(mad.REQ)
	var ours encap.PrivateData
	_ = ours.UnmarshalBinary(got.PrivateData[:])
	fmt.Printf("%d octets, %v\n", len(octets), header.Attr)
	fmt.Printf("%v to %v by %v\n", got.LocalQPN, got.ServiceID, got.Transport)
	fmt.Printf("UD QPN %v, Receive MTU %d\n", ours.QPN, ours.ReceiveMTU)
	// Output:
	// 256 octets, REQ
	// 0x0000a1 to 0x0100000000000456 by RC
	// UD QPN 0x000123, Receive MTU 65524
}
