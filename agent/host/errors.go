package host

import (
	"context"
	"errors"
	"fmt"
)

// Kind sorts errors by what the caller can do about them.
type Kind string

// The kinds.
const (
	KindInvalid     Kind = "invalid"
	KindStale       Kind = "stale" // an older stamp than one already seen
	KindNotFound    Kind = "not_found"
	KindConflict    Kind = "conflict"
	KindUnavailable Kind = "unavailable" // no answer: says nothing about what is there
	KindNoSpace     Kind = "no_space"
	KindDenied      Kind = "denied" // a registry refused us
	KindStalled     Kind = "stalled"
	KindInternal    Kind = "internal"
)

// Error is an error with a kind. Message may be shown to users.
type Error struct {
	Kind    Kind
	Message string
	Cause   error
}

// Errorf makes an error of a kind.
func Errorf(kind Kind, format string, args ...any) error {
	return &Error{Kind: kind, Message: fmt.Sprintf(format, args...)}
}

// Wrap gives a cause a kind and a message; nil stays nil.
func Wrap(cause error, kind Kind, format string, args ...any) error {
	if cause == nil {
		return nil
	}
	return &Error{Kind: kind, Message: fmt.Sprintf(format, args...), Cause: cause}
}

// Error returns the message and, where there is one, the cause.
func (e *Error) Error() string {
	if e.Cause == nil {
		return e.Message
	}
	return e.Message + ": " + e.Cause.Error()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// KindOf returns the kind of the first [Error] in the chain, KindUnavailable for a call that was cut short, else KindInternal;
// "" for nil.
func KindOf(err error) Kind {
	if err == nil {
		return ""
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return KindUnavailable
	}
	return KindInternal
}
