package ib

import "fmt"

// A Rate is a 6-bit static rate code, as path records, groups and address
// handles carry it. Zero is the rate of the port itself.
type Rate uint8

// gbps holds the rates by code in tenths of Gbit/s; 0 marks a code that is no rate.
var gbps = [...]uint16{2: 25, 3: 100, 4: 300, 5: 50, 6: 200, 7: 400, 8: 600, 9: 800, 10: 1200, 11: 140, 12: 560,
	13: 1120, 14: 1680, 15: 250, 16: 1000, 17: 2000, 18: 3000, 19: 280, 20: 500, 21: 4000, 22: 6000, 23: 8000}

// Rate10G is 10 Gbit/s, which opensm gives to groups if nothing else is configured.
const Rate10G Rate = 3

// Mbps returns the rate in Mbit/s, or 0 if r is no code of a rate.
func (r Rate) Mbps() int {
	if int(r) >= len(gbps) {
		return 0
	}
	return int(gbps[r]) * 100
}

// String prints the rate in Gbit/s, as ibstat does.
func (r Rate) String() string {
	switch m := r.Mbps(); {
	case r == 0:
		return "port rate"
	case m == 0:
		return fmt.Sprintf("Rate(%d)", uint8(r))
	case m%1000 == 0:
		return fmt.Sprintf("%d Gb/s", m/1000)
	default:
		return fmt.Sprintf("%d.%d Gb/s", m/1000, m%1000/100)
	}
}
