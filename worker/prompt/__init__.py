"""Prompts: conversion of a request to a row by template, tokenizer and validation."""
