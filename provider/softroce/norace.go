//go:build !race

package softroce

func raceSent()     {}
func raceReceived() {}
