// Package rpc holds the thin handlers of the user API: convert, call one method, convert.
package rpc
