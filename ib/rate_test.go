package ib_test

import (
	"testing"

	"ipoibcm/ib"
)

func TestRate(t *testing.T) {
	for _, tt := range []struct {
		code ib.Rate
		mbps int
		text string
	}{
		{0, 0, "port rate"},
		{1, 0, "Rate(1)"},
		{2, 2500, "2.5 Gb/s"},
		{ib.Rate10G, 10000, "10 Gb/s"},
		{5, 5000, "5 Gb/s"}, // the codes are in no order
		{7, 40000, "40 Gb/s"},
		{16, 100000, "100 Gb/s"},
		{23, 800000, "800 Gb/s"},
		{24, 0, "Rate(24)"},
		{255, 0, "Rate(255)"},
	} {
		if got := tt.code.Mbps(); got != tt.mbps {
			t.Errorf("code %d: got %d Mb/s, want %d", uint8(tt.code), got, tt.mbps)
		}
		if got := tt.code.String(); got != tt.text {
			t.Errorf("code %d: got %q, want %q", uint8(tt.code), got, tt.text)
		}
	}
}
