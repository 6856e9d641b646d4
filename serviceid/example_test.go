package serviceid_test

import (
	"fmt"

	"ipoibcm/serviceid"
)

// The host that dials puts the UD QPN of the interface it calls into the service ID.
func Example() {
	fmt.Println(serviceid.New(serviceid.RFC, 0x000456))
	fmt.Println(serviceid.New(serviceid.Legacy, 0x000456))

	form, qpn := serviceid.Parse(0x1000000000000456)
	fmt.Println(form, qpn)
	// Output:
	// 0x0100000000000456
	// 0x1000000000000456
	// legacy 0x000456
}
