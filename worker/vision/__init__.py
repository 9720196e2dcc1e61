"""Images, video and audio: conversion of a request's bytes to features for a prompt."""
