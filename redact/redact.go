// Package redact takes identifiers out of texts and documents.
package redact

import (
	"reflect"
	"regexp"
	"time"
)

// Mark stands where an identifier was.
const Mark = "redacted"

// identifiers matches what may be a communication ID, QPN, PSN, Q_Key, P_Key,
// service ID or GUID, and the P_Key in an MGID (RFC 4391 section 4), in any text of
// ours: numbers with 0x, six or more hexadecimal digits in a row, and what follows
// comm=, remote=, qpn=, psn= and service=. A number that is no identifier may match
// too; a part of an IP address does not.
var identifiers = regexp.MustCompile(`0[xX][0-9a-fA-F]+|[0-9a-fA-F]{6,}|` +
	`\b(?:comm|remote|qpn|psn|service)=[^\s,;)]+|\b[fF][fF][0-9a-fA-F]{2}:[46]01[bB]:[0-9a-fA-F]*`)

// Text takes what may be an identifier out of a text: communication IDs, QPNs, PSNs,
// Q_Keys, P_Keys, service IDs and GUIDs.
func Text(s string) string { return identifiers.ReplaceAllLiteralString(s, Mark) }

// All returns a copy of v, a document of package control, without identifiers in any of its texts,
// however deep. It walks v by reflection, so it covers fields that are yet to come.
func All[T any](v T) T { return Texts(v, Text) }

// Texts returns a copy of v with change applied to each of its texts.
func Texts[T any](v T, change func(string) string) T {
	return value(reflect.ValueOf(&v).Elem(), change).Interface().(T)
}

func value(v reflect.Value, change func(string) string) reflect.Value {
	if v.IsZero() {
		return v
	}
	out := reflect.New(v.Type()).Elem()
	switch v.Kind() {
	case reflect.String:
		out.SetString(change(v.String()))
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return v
		}
		for i := range v.NumField() {
			out.Field(i).Set(value(v.Field(i), change))
		}
	case reflect.Slice:
		out.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			out.Index(i).Set(value(v.Index(i), change))
		}
	case reflect.Map:
		out.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		for it := v.MapRange(); it.Next(); {
			out.SetMapIndex(value(it.Key(), change), value(it.Value(), change))
		}
	case reflect.Pointer:
		out.Set(reflect.New(v.Type().Elem()))
		out.Elem().Set(value(v.Elem(), change))
	default:
		return v
	}
	return out
}
